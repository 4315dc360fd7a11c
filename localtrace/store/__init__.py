"""The store on disk: journals, tables and everything between them. README.md is the format."""
