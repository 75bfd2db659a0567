"""The experiments, one module for each question; `sdpa_lab` exports their functions."""
