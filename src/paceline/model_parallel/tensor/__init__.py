"""Layers whose matrices are cut over workers: in one dimension (Megatron), two (Optimus) or two and a half (SUMMA2.5-LM)."""
