"""What is done to the repository as a whole: a check and a record of releases, and the nightly list."""
