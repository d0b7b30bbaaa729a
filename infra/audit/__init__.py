"""Every stream, token and row accounted for: what the log says, held against what was billed and received."""
