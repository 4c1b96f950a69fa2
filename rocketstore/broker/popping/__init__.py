"""Pop on the broker's loop: what ``rocketstore.pop`` decides is read, written, waited for and answered here."""
