"""The rollout pool: engine replicas, their fleet, the controller that fills the queue, and the agent loops."""
