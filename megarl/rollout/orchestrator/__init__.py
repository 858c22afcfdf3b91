"""The run's controller actor: it starts groups, settles each once, and hands out batches."""
