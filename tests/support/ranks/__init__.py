"""Functions that each rank of a torchrun test world runs: `world(2).run("tests.support.ranks.policy:train", ...)`."""
