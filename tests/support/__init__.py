"""What tests are told with: scenes, stories, worked answers, and stand-ins for what is not here."""
