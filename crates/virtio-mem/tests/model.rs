//! Random requests, sizes, failures and restarts against a set of blocks.

mod driver;

use std::collections::BTreeSet;

use driver::*;
use ebb_units::Gpa;
use ebb_virtio_mem::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Action {
    Ask(Request),
    Bytes(Vec<u8>),
    Resize(u64),
    PlugFails,
    UnplugFails,
    Reset,
    Restart,
}

/// The device as the standard describes it.
#[derive(Default)]
struct Model {
    plugged: BTreeSet<u64>,
    usable: u64,
    requested: u64,
    plug_fails: bool,
    unplug_fails: bool,
}

impl Model {
    fn fit(&self) -> u64 {
        if self.requested == 0 { 0 } else { (self.requested + 10).min(BLOCKS) }
    }

    /// Returns the named blocks, if they are in the usable region.
    fn blocks(&self, named: Named) -> Option<Vec<u64>> {
        let offset = named.start.0.checked_sub(GEOMETRY.start.0)?;
        let first = (offset % BLOCK == 0).then_some(offset / BLOCK)?;
        let blocks: Vec<u64> = (0..u64::from(named.count)).map(|index| first + index).collect();
        (!blocks.is_empty() && blocks.iter().all(|block| *block < self.usable)).then_some(blocks)
    }

    fn answer(&mut self, request: Request) -> Response {
        match request {
            Request::Plug(named) => self.plug(named),
            Request::Unplug(named) => self.unplug(named),
            Request::UnplugAll => self.unplug_all(),
            Request::State(named) => {
                let Some(blocks) = self.blocks(named) else { return Response::Error };
                let count = blocks.iter().filter(|block| self.plugged.contains(block)).count();
                Response::AckState(match count {
                    0 => BlockState::Unplugged,
                    _ if count == blocks.len() => BlockState::Plugged,
                    _ => BlockState::Mixed,
                })
            }
        }
    }

    fn plug(&mut self, named: Named) -> Response {
        let Some(blocks) = self.blocks(named) else { return Response::Error };
        if blocks.iter().any(|block| self.plugged.contains(block)) {
            return Response::Error;
        }
        if (self.plugged.len() + blocks.len()) as u64 > self.requested {
            return Response::Nack;
        }
        if std::mem::take(&mut self.plug_fails) {
            return Response::Busy;
        }
        self.plugged.extend(blocks);
        Response::Ack
    }

    fn unplug(&mut self, named: Named) -> Response {
        let Some(blocks) = self.blocks(named) else { return Response::Error };
        if !blocks.iter().all(|block| self.plugged.contains(block)) {
            return Response::Error;
        }
        if std::mem::take(&mut self.unplug_fails) {
            return Response::Busy;
        }
        blocks.iter().for_each(|block| assert!(self.plugged.remove(block)));
        Response::Ack
    }

    fn unplug_all(&mut self) -> Response {
        if !self.plugged.is_empty() && std::mem::take(&mut self.unplug_fails) {
            return Response::Busy;
        }
        self.plugged.clear();
        self.usable = self.fit();
        Response::Ack
    }
}

fn blocks() -> impl Strategy<Value = Named> {
    let wild =
        (any::<u64>(), any::<u16>()).prop_map(|(start, count)| Named { start: Gpa(start), count });
    let near = (0..(BLOCKS + 4) * 2, 0..40u16).prop_map(|(half, count)| Named {
        start: Gpa(GEOMETRY.start.0 - BLOCK + half * BLOCK / 2),
        count,
    });
    let good = (0..BLOCKS, 1..12u16).prop_map(|(first, count)| named(first, count));
    prop_oneof![1 => wild, 2 => near, 12 => good]
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        6 => blocks().prop_map(Request::Plug),
        4 => blocks().prop_map(Request::Unplug),
        1 => Just(Request::UnplugAll),
        2 => blocks().prop_map(Request::State),
    ]
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        30 => request().prop_map(Action::Ask),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Action::Bytes),
        5 => (0..=BLOCKS).prop_map(Action::Resize),
        1 => Just(Action::PlugFails),
        1 => Just(Action::UnplugFails),
        1 => Just(Action::Reset),
        2 => Just(Action::Restart),
    ]
}

fn run(driver: &mut Driver, model: &mut Model, action: Action) {
    match action {
        Action::Ask(request) => {
            let before = model.plugged.clone();
            let expected = model.answer(request);
            assert_eq!(driver.ask(request), expected, "{request:?} with {before:?}");
        }
        Action::Bytes(bytes) => {
            let expected = match Request::parse(&bytes) {
                Some(request) => model.answer(request),
                None => Response::Error,
            };
            assert_eq!(driver.device.handle(&bytes), Ok(expected.to_bytes()));
            Request::parse(&bytes).inspect(|request| driver.learn(*request, expected));
        }
        Action::Resize(blocks) => {
            driver.request_blocks(blocks);
            model.requested = blocks;
            model.usable = model.usable.max(model.fit());
        }
        Action::PlugFails => {
            driver.host.plug_fails.set(0);
            model.plug_fails = true;
        }
        Action::UnplugFails => {
            // This does not happen while blocks are being put back as well.
            let alone = model.plugged.is_empty();
            driver.host.unplug_fails.set(if alone { -1 } else { 0 });
            model.unplug_fails = !alone;
        }
        Action::Reset => driver.device.reset(),
        Action::Restart => {
            driver.host.plug_fails.set(-1);
            driver.host.unplug_fails.set(-1);
            (model.plug_fails, model.unplug_fails) = (false, false);
            driver.restart();
            // The driver has no request in flight, so its next one is a new one.
            driver.ask(state(0, 1));
        }
    }
    assert_eq!(driver.believed, model.plugged);
    assert_eq!(driver.blocks(), [model.usable, model.plugged.len() as u64, model.requested]);
    driver.check();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn it_does_what_the_standard_says(actions in prop::collection::vec(action(), 1..60)) {
        let (mut driver, mut model) = (Driver::new(), Model::default());
        for action in actions {
            run(&mut driver, &mut model, action);
        }
    }
}
