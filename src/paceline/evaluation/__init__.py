"""What a model is worth: of a task, of a user's loop; targets and limits."""
