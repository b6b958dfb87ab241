"""Supervised runs: fine-tuning, preferences, distillation, and reward models."""
