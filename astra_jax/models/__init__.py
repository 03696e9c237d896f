"""Models. A model's folder answers four questions in four files: modules, sharding, weights, presets."""
