"""The tests: one folder per wheel, `workspace` for the repository itself, `support` for what they share."""
