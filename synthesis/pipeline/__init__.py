"""What the stages of both tracks share: the teacher, where work is done, languages, what is held out."""
