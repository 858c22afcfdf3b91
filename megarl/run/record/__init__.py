"""Everything that a run writes about itself."""
