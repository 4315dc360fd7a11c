"""Glue to trainers and engines. Each hook imports the one system that it is for."""
