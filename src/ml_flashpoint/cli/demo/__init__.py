"""`flashpoint demo`: a training job that loses a rank, then a whole node, and ends with the same weights.

`job`, `model` and `text` are the job, written as anybody's training script would be. The other modules play the
machines it runs on, break them, and check what became of it.
"""
