"""What may be unpickled: archives of `torch.save` read by a machine of our own that only knows allowed globals."""
