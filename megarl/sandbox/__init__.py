"""A locked-down process for code that a model wrote."""
