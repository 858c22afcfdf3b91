"""The rollout pool: a supervisor that owns everything, engine replicas, the controller, and the trainer's client."""
