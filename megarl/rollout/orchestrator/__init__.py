"""The actor of a run: it starts groups, settles each once, and hands out batches."""
