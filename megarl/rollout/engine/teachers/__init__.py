"""Teachers that run in engines and score the policy's samples."""
