"""The rollouts of a training step: scheduled, sampled or played, judged, and admitted."""
