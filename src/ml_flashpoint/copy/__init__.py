"""Copies between the program's tensors and memory that this package maps: on the CPU, from CUDA and to it."""
