"""Adapters of low rank beside linear layers whose weights are frozen for good."""

from torchtitan.lora.settings import Lora

__all__ = ["Lora"]
