"""Programs outside megarl that act through the gateway, and whose sessions are trained on."""
