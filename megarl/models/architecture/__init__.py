"""What a model is: its sizes, its rotary embeddings, and the mapping of its tensors."""
