"""What travels between the processes of a dictionary: requests, keys, the account of writes. Imports errors only."""
