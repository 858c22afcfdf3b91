"""Generated tokens outlive every process: the journal, and what a resume uses from it."""
