"""Programs outside megarl that act through the door, and whose sessions are trained on."""
