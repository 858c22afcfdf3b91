"""`megarl report`: one HTML page about one or several runs, from the files in their directories."""
