"""The form of a checkpoint on disk and on the wire: names, dtypes, layouts, objects, manifests, digests, errors.

The ground of the package: nothing here imports torch, so that tools and processes that only move bytes start fast.
"""
