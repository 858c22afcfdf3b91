"""Teachers with engines of their own: they score what the policy has sampled."""
