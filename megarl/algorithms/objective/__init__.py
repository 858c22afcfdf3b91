"""The training loss: its terms, their weights, and its statistics."""
