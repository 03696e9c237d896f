"""Presets: which sizes, datasets and schedules make up a run, composed of the configs of the layers below."""
