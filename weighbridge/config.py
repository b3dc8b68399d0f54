"""The one configuration file: decoding, substitution and errors that name file and place."""
