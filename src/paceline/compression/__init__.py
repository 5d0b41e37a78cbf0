"""How vectors become fewer bytes."""
