"""Programs outside megarl that act through the gateway, and whose sessions train the model."""
