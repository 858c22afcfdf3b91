"""The checkpoint scheme shared by trainer and converter, and the converter itself."""
