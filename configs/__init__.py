"""Presets: which sizes, datasets and schedules make up a run. Each module composes the configs of the rooms below."""
