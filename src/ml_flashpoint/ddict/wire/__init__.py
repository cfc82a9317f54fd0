"""What all processes of a dictionary agree on: connections, keys, fields of requests, their order and their account."""
