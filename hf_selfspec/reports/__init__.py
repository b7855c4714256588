"""What a model's layers and exits are worth."""
