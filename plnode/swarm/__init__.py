"""Who is here, who holds which stage, and when a generation of the run begins."""
