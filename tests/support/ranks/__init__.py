"""Functions that each rank of a test world runs: `world(2).run("tests.support.ranks.training.policy:train", ...)`."""
