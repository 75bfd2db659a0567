"""The experiments, one module for each question; `sdpa.lab` exports their functions."""
