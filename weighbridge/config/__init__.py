"""The one configuration file: reading YAML, filling in `${ENV}`, and errors that name file, line and place."""
