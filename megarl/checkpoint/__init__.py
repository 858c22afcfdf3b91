"""The checkpoint format shared by trainer and converter, saving, and the converter."""
