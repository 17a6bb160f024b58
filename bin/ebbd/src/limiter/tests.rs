use ebb_store::StoreError;

use super::*;
use crate::window::tests::Machine;

fn limiter() -> Option<Limiter> {
    let machine = Machine::new()?;
    Some(Limiter::new(&machine.process, &machine.pager, false).unwrap())
}

#[test]
fn what_is_in_vain_ends() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    assert!(limiter.is_more(8, true));
    let steps = |limiter: &mut Limiter| (1..100).find(|_| !limiter.is_more(8, false));
    assert_eq!(steps(&mut limiter), Some(FRUITLESS_STEPS));
    // Anew the next time.
    assert_eq!(steps(&mut limiter), Some(FRUITLESS_STEPS));
}

#[test]
fn what_needs_no_room_is_looked_for_before_it_is_said_that_there_is_none() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    let full = || io::Error::from(StoreError::Full);
    assert!(limiter.go_without_room(full(), false).is_ok());
    assert!(limiter.go_without_room(full(), true).is_ok());
    assert!(is_no_room(&limiter.go_without_room(full(), false).unwrap_err()));
    // Then from the beginning; of anything else it is told at once.
    assert!(limiter.go_without_room(full(), false).is_ok());
    let other = io::Error::from(io::ErrorKind::PermissionDenied);
    assert!(limiter.go_without_room(other, true).is_err());
    assert!(limiter.no_room.is_none());
}
