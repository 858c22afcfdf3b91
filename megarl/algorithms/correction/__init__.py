"""Off-policy corrections: weights and masks for token losses."""
