//! Plans against a slow and simple planner, and what must hold for each plan.

use std::collections::{BTreeMap, HashSet};

use ebb_tier::plan::{Heat, Move, PagePlace, Plan, Rules, Step, plan};
use ebb_units::Gfn;
use proptest::prelude::*;

/// The degrees and places of all pages, by frame number, and the rules.
#[derive(Clone, Debug)]
struct Case {
    pages: Vec<(u32, PagePlace)>,
    rules: Rules,
}

fn place(tiers: u8) -> impl Strategy<Value = PagePlace> {
    prop_oneof![
        8 => (0..tiers).prop_map(PagePlace::Tier),
        1 => (0..tiers).prop_map(PagePlace::Busy),
        1 => Just(PagePlace::Nowhere),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    (1u8..4).prop_flat_map(|tiers| {
        let pages = prop::collection::vec((0u32..12, place(tiers)), 0..40);
        let capacity = prop::collection::vec(0u64..30, usize::from(tiers));
        let budget = prop_oneof![Just(u64::MAX), 0u64..20];
        (pages, capacity, 0u32..4, budget).prop_map(|(pages, capacity_frames, margin, budget)| {
            let rules = Rules {
                capacity_frames,
                margin_degrees: margin,
                free_degrees: margin,
                budget_frames: budget,
            };
            Case { pages, rules }
        })
    })
}

/// The pages, coldest first. Pages of one degree are in order of address.
fn order(case: &Case) -> Vec<Heat> {
    let heat = |(gfn, page): (u64, &(u32, PagePlace))| Heat { gfn: Gfn(gfn), degree: page.0 };
    let mut order: Vec<Heat> = (0..).zip(&case.pages).map(heat).collect();
    order.sort_by_key(|heat| heat.degree);
    order
}

fn planned(case: &Case) -> Plan {
    plan(&order(case), |gfn| case.pages[gfn.0 as usize].1, &case.rules)
}

fn used(places: &[PagePlace], tier: u8) -> u64 {
    let here = |place: &&PagePlace| [PagePlace::Tier(tier), PagePlace::Busy(tier)].contains(place);
    places.iter().filter(here).count() as u64
}

/// The same plan, made by looking at every page for every step.
fn naive(case: &Case) -> Vec<Step> {
    let order = order(case);
    let capacity = &case.rules.capacity_frames;
    let margin = case.rules.margin_degrees.max(1);
    let mut places: Vec<PagePlace> = case.pages.iter().map(|(_, place)| *place).collect();
    let mut moved = HashSet::new();
    let (mut steps, mut left) = (Vec::new(), case.rules.budget_frames);
    for tier in 0..capacity.len() as u8 {
        loop {
            let free = |heat: &&Heat| !moved.contains(&heat.gfn);
            let place = |heat: &Heat| places[heat.gfn.0 as usize];
            let cold = order.iter().filter(free).find(|heat| place(heat) == PagePlace::Tier(tier));
            let below = |heat: &&Heat| matches!(place(heat), PagePlace::Tier(at) if at > tier);
            let hot = order.iter().rev().filter(free).find(below);
            let (have, may) = (used(&places, tier), capacity[usize::from(tier)]);
            let room = (tier + 1..capacity.len() as u8)
                .find(|&at| used(&places, at) < capacity[usize::from(at)]);
            let go = |heat: &Heat, to| match place(heat) {
                PagePlace::Tier(from) => Some(Move { gfn: heat.gfn, from, to }),
                _ => None,
            };
            let step = match (cold, hot, room) {
                (Some(cold), _, Some(to)) if have > may => Step { down: go(cold, to), up: None },
                (_, Some(hot), _) if have < may && hot.degree >= margin => {
                    Step { down: None, up: go(hot, tier) }
                }
                (Some(cold), Some(hot), _) if have >= may && hot.degree >= cold.degree + margin => {
                    let PagePlace::Tier(from) = place(hot) else { break };
                    Step { down: go(cold, from), up: go(hot, tier) }
                }
                _ => break,
            };
            if step.frames() > left {
                break;
            }
            left -= step.frames();
            for moved_page in [step.down, step.up].into_iter().flatten() {
                places[moved_page.gfn.0 as usize] = PagePlace::Tier(moved_page.to);
                moved.insert(moved_page.gfn);
            }
            steps.push(step);
        }
    }
    steps
}

/// Carries out a plan, and checks each step.
fn carry_out(case: &mut Case, plan: &Plan) {
    let mut moved = HashSet::new();
    for step in &plan.steps {
        for moved_page in [step.down, step.up].into_iter().flatten() {
            assert!(moved.insert(moved_page.gfn), "{:?} moves twice", moved_page.gfn);
            let place = &mut case.pages[moved_page.gfn.0 as usize].1;
            assert_eq!(*place, PagePlace::Tier(moved_page.from), "{moved_page:?}");
            *place = PagePlace::Tier(moved_page.to);
        }
        if let Some(down) = step.down {
            assert!(down.to > down.from);
        }
        if let Some(up) = step.up {
            assert!(up.to < up.from);
        }
    }
}

fn usage(case: &Case) -> BTreeMap<u8, u64> {
    let places: Vec<PagePlace> = case.pages.iter().map(|(_, place)| *place).collect();
    let tiers = 0..case.rules.capacity_frames.len() as u8;
    tiers.map(|tier| (tier, used(&places, tier))).collect()
}

proptest! {
    #[test]
    fn it_is_what_a_simple_planner_does(case in case()) {
        prop_assert_eq!(planned(&case).steps, naive(&case));
    }

    #[test]
    fn no_page_moves_twice_and_no_tier_overflows(mut case in case()) {
        let before = usage(&case);
        let plan = planned(&case);
        prop_assert!(plan.frames() <= case.rules.budget_frames);
        carry_out(&mut case, &plan);
        for (tier, now) in usage(&case) {
            let capacity = case.rules.capacity_frames[usize::from(tier)];
            prop_assert!(now <= capacity.max(before[&tier]), "tier {tier}");
        }
    }

    #[test]
    fn it_comes_to_rest(mut case in case()) {
        case.rules.budget_frames = case.rules.budget_frames.max(2);
        let mut rounds = 0;
        loop {
            let plan = planned(&case);
            if plan.steps.is_empty() {
                break;
            }
            carry_out(&mut case, &plan);
            rounds += 1;
            prop_assert!(rounds < 1000, "it moves pages for ever");
        }
        let margin = case.rules.margin_degrees.max(1);
        let here = |tier| {
            let pages = case.pages.iter().filter(move |(_, place)| *place == PagePlace::Tier(tier));
            pages.map(|(degree, _)| *degree)
        };
        for tier in 0..case.rules.capacity_frames.len() as u8 {
            for slow in tier + 1..case.rules.capacity_frames.len() as u8 {
                if let (Some(cold), Some(hot)) = (here(tier).min(), here(slow).max()) {
                    let full = usage(&case)[&tier] >= case.rules.capacity_frames[usize::from(tier)];
                    prop_assert!(!full || hot < cold + margin, "{hot} below {cold}");
                }
            }
        }
    }
}

#[test]
fn pages_in_use_wait() {
    let pages = vec![
        (0, PagePlace::Busy(0)),
        (1, PagePlace::Tier(0)),
        (8, PagePlace::Tier(1)),
        (9, PagePlace::Busy(1)),
    ];
    let rules = Rules {
        capacity_frames: vec![2, 2],
        margin_degrees: 1,
        free_degrees: 1,
        budget_frames: u64::MAX,
    };
    let plan = planned(&Case { pages, rules });
    let down = Some(Move { gfn: Gfn(1), from: 0, to: 1 });
    let up = Some(Move { gfn: Gfn(2), from: 1, to: 0 });
    assert_eq!(plan, Plan { steps: vec![Step { down, up }], waiting_frames: 2, is_cut: false });
}

#[test]
fn a_plan_that_the_budget_cuts_says_so() {
    let pages = vec![(0, PagePlace::Tier(0)), (9, PagePlace::Tier(1))];
    let rules =
        Rules { capacity_frames: vec![1, 1], margin_degrees: 1, free_degrees: 1, budget_frames: 1 };
    let plan = planned(&Case { pages, rules });
    assert!(plan.steps.is_empty() && plan.is_cut);
}
