"""The names of options in other trainers, for the error that suggests the option here."""
