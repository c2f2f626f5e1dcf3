"""What is trained, and on which samples: models, one rank of such a training, clicks of several sources."""
