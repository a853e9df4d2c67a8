"""Scores and speeds of served models, resumable, plain decoding beside every schedule."""
