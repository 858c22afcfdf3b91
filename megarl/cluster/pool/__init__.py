"""The processes of the pool: the supervisor, the Ray head and the actors."""
