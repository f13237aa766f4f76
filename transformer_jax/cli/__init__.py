"""The command line: one file for each command, thin; `main` finds the command and turns errors into exit codes."""
